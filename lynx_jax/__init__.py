# SPDX-License-Identifier: Apache-2.0
"""Lynx in JAX: progressive KV transfer with speculative verification."""
