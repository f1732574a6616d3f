"""What the server has imported from which ranks are forked: see :mod:`tests.harness`."""

# ruff: noqa: F401

from __future__ import annotations

from contextlib import suppress

from shardwise.elastic.rank import importing

with importing():
    import pytest
    import torch._dynamo  # the first optimizer of a process imports it, for half a second
    import torch._dynamo.backends.debugging
    import torch._inductor.pattern_matcher  # and the first compiled block this, for more than one
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.distributed.tensor.parallel
    import torch.profiler
    import transformers.models.llama.modeling_llama

    import shardwise.elastic.agent
    import shardwise.frontends.fsdp2
    import shardwise.frontends.meta
    import shardwise.optim.norms
    import shardwise.transport.buckets  # what tests change in it is put back

    # A machine with a GPU, to which nothing can be added, may not have all of these.
    with suppress(ImportError):
        import datasets  # and pandas with it: what ranks that train on streams of text need
        import typer._adapters  # and pydantic with it, as soon as a command has an option

        import shardwise.app.cli.main
        import shardwise.app.cli.train
        import shardwise.app.recipes.images
        import shardwise.app.recipes.lm
        import shardwise.app.recipes.mnist
        import shardwise.app.recipes.text.adapters  # peft, which takes most of a second
        import tests.recipes.digits
        import tests.recipes.running
        import tests.recipes.small

    import tests.harness
    import tests.shapes

    tests.harness.remember()
    tests.shapes.remember_shapes()
