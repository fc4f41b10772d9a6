# SPDX-License-Identifier: Apache-2.0
# Targets of the kernels; the Makefile includes this file and explains them.

.PHONY: kernel-costs bench
kernel-costs: $(STAMPS)/test
	$(RUN) -m experiments.kernel_costs

bench: $(STAMPS)/test
	$(RUN) -m experiments.bench_kernels
