"""A model of one's own as a plugin: (architecture in the checkpoint's config.json, stage) -> module with its `SPEC`."""

MODELS = {("LlamaForCausalLM", "thinker"): "custom_model.llama"}
