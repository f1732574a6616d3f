#!/usr/bin/env bash
# gloo and views with gaps: all_reduce(table[:, 0]) changes the second column, and sums neither.
#
# Guess: the column is summed, or there is an error, as on NCCL ("Tensors must be contiguous").
# Found (torch 2.13.0, 2.15.0): gloo takes the address of the first element, and as many elements from
# there as the view has. Where one rank holds the same matrix in another memory order (a transpose, or
# channels_last), it adds elements that do not belong together. No error, no warning.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

table = torch.arange(6.0).view(3, 2)
dist.all_reduce(table[:, 0])
assert table.tolist() == [[0, 2], [4, 3], [4, 5]], table  # right: [[0, 1], [4, 3], [8, 5]]

matrix = torch.arange(6.0).view(2, 3)
if rank == 1:
    matrix = matrix.t().contiguous().t()  # the same values, by columns
dist.all_reduce(matrix)
assert matrix.tolist() != [[0, 2, 4], [6, 8, 10]], matrix

sent = torch.arange(6.0).view(2, 3).t() if rank == 0 else torch.zeros(3, 2)
dist.broadcast(sent, 0)
if rank == 1:
    assert sent.tolist() == [[0, 1], [2, 3], [4, 5]], sent  # right: [[0, 3], [1, 4], [2, 5]]
    print("all_reduce(table[:, 0]):", table.tolist(), "in place of [[0, 1], [4, 3], [8, 5]]")
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   all_reduce(table[:, 0]): [[0.0, 2.0], [4.0, 3.0], [4.0, 5.0]] in place of [[0, 1], [4, 3], [8, 5]]
