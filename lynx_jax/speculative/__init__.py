# SPDX-License-Identifier: Apache-2.0
"""Drafting on the Anchor, verifying on the target, committing what agrees."""
