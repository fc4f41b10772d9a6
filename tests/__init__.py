# SPDX-License-Identifier: Apache-2.0
"""Tests of the library and of the experiments."""
