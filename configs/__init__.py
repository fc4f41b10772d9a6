# SPDX-License-Identifier: Apache-2.0
"""Settings of a run: each file edits values of a base, and adds no logic."""
