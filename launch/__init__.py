# SPDX-License-Identifier: Apache-2.0
"""Ways to start both sides on slices of TPU chips; docs/pods.md has them."""
