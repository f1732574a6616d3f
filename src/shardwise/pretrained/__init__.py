"""Models of ``transformers`` with published weights, loaded straight into shards.

``api.py`` does it in one call, and saves shards as ``transformers`` would save the full model.
``building.py`` makes the model without memory, ``filling.py`` reads this rank's rows of its weights
from the files, and ``hf.py`` asks ``transformers`` what is what.
"""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.pretrained.api import from_pretrained, save_pretrained
    from shardwise.pretrained.building import build
    from shardwise.pretrained.causal_lm import causal_lm_loss
    from shardwise.pretrained.filling import LoadReport, fill

__all__ = ["LoadReport", "build", "causal_lm_loss", "fill", "from_pretrained", "save_pretrained"]


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__)
