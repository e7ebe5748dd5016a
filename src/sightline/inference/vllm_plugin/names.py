"""Names that our plugin and the command that starts vLLM must agree on."""

from __future__ import annotations

WEIGHT_TRANSFER_BACKEND = "sightline"
"""What `--weight-transfer-config` calls our weight transfer."""
LOAD_FORMAT = "sightline"
"""What `--load-format` calls our loader, for checkpoints whose layout vLLM does not read."""
MIDDLEWARE = "sightline.inference.vllm_plugin.middleware.Middleware"
LOGITS_PROCESSOR = "sightline.inference.vllm_plugin.logits_processor:BannedIdsProcessor"
CONFIG_KEY = "sightline"
"""Key of our settings in vLLM's `--additional-config`."""
BANNED_IDS_KEY = "sightline_banned"
"""Key of what a request bans, in the `extra_args` of vLLM's sampling parameters."""
