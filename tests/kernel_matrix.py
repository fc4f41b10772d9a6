# SPDX-License-Identifier: Apache-2.0
"""The cells of the kernel matrix that CI compiles.

About 40 of all cells: every kernel form, generation and head dim at least
once. `make kernel-costs` compiles all of them.
"""

from experiments.kernel_costs import Cell, cells

# Head dims of 64 query rows, which take longest to compile.
MANY_ROWS = {
  'v5e': (64, 128),
  'v5p': (128,),
  'v6e': (128, 256),
  'tpu7x': (256,),
}


def _wanted(cell: Cell) -> bool:
  if cell.generation == 'v4':  # only bfloat16: its MXU multiplies no int8
    return cell.head_dim == 128 and cell.block == 4096
  if cell.query_rows > 4:
    return (
      cell.kernel == 'attention_anchor_residual'
      and cell.head_dim in MANY_ROWS[cell.generation]
    )
  if cell.kernel == 'attention_bf16':
    return cell.head_dim == 128 and cell.block == 4096
  if cell.kernel in ('split', 'merge'):
    return cell.head_dim == {'v5e': 64, 'v6e': 256}.get(cell.generation, 128)
  if cell.kernel == 'attention_anchor':
    return cell.block == 2048
  # At head dim 64 it differs from `attention_anchor` in the unpacking alone.
  return cell.block == 2048 and cell.head_dim > 64


CI_CELLS = [cell for cell in cells() if _wanted(cell)]
