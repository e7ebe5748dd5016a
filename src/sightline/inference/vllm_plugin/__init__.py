"""vLLM as the engine behind the generate protocol, through vLLM's own extension points.

    vLLM's API server (process 0)                         vLLM's engine process
      middleware: our server answers every path             weight_transfer: reads weight files
        validator -> pixels in a pool -> multimodal_items   logits_processor: bans pads
        engine: EngineClient.generate, pause, resume
      register: the entry point of vllm.general_plugins, in both

vLLM's own handlers, template and image processor are not reached. All names of vLLM that are used
stand in `symbols`; no other file imports vllm.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, and in those of others who have us installed.

    It only adds names, so that a vLLM that is not ours runs as if we were not there.
    """
    from sightline.inference.vllm_plugin.names import LOAD_FORMAT, WEIGHT_TRANSFER_BACKEND
    from sightline.inference.vllm_plugin.parent_death import end_with_parent, is_child_of_our_server
    from sightline.inference.vllm_plugin.symbols import (
        WeightTransferEngineFactory,
        keep_images_with_requests,
        register_model_loader,
    )
    from sightline.inference.vllm_plugin.weight_transfer import LayoutLoader

    if is_child_of_our_server():
        end_with_parent()
        keep_images_with_requests()

    try:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND,
            "sightline.inference.vllm_plugin.weight_transfer",
            "FileWeightTransfer",
        )
    except ValueError:  # vLLM may call this again in one process
        return
    register_model_loader(LOAD_FORMAT)(LayoutLoader)
