# SPDX-License-Identifier: Apache-2.0
# Targets of the kernels; the Makefile includes this file.
#   make kernel-costs   compile every kernel for every TPU generation, compare
#   make bench          time the kernels on whatever device is here

.PHONY: kernel-costs bench
kernel-costs: $(STAMPS)/test
	$(RUN) -m experiments.kernel_costs

bench: $(STAMPS)/test
	$(RUN) -m experiments.bench_kernels
