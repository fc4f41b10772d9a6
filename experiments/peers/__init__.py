# SPDX-License-Identifier: Apache-2.0
"""KV caches of others, run by their own code on our prompts.

Each implementation runs in a process of its own, in an environment of its own
(`make peers` makes `.venv-peers`): nothing here imports torch but `hf_cache`,
and nothing in `hf_cache`, `llama_cpp` and `exchange` imports jax.
"""
