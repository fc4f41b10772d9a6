# SPDX-License-Identifier: Apache-2.0
"""Runs Lynx and measures it: flags, files, prompts, studies and pictures.

Everything that reads a flag or writes a file is here; `lynx_jax` does neither.
"""
