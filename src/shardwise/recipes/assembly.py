"""From a checked configuration to everything that its training is made of."""

from __future__ import annotations

from shardwise.recipes.core.begin import Inputs
from shardwise.recipes.core.task import Place, Task
from shardwise.recipes.text.config import LmInputs
from shardwise.recipes.vision.config import ImagenetInputs, MnistInputs, VitInputs


def assemble(inputs: Inputs, place: Place) -> Task:
    """Build everything on one rank, as all ranks do at the same time.

    A recipe is imported when it is asked for: most need ``transformers``, which takes seconds.

    Raises:
        TypeError: no recipe takes such inputs.
    """
    match inputs:
        case LmInputs():
            from shardwise.recipes import lm

            return lm.assemble(inputs, place)
        case MnistInputs():
            from shardwise.recipes import mnist

            return mnist.assemble(inputs, place)
        case ImagenetInputs():
            from shardwise.recipes import imagenet

            return imagenet.assemble(inputs, place)
        case VitInputs():
            from shardwise.recipes import vit

            return vit.assemble(inputs, place)
    raise TypeError(f"expected the inputs of a recipe, found {type(inputs).__name__}")
