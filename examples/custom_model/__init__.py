"""A custom model as a plugin: maps (architecture in the checkpoint's config.json, stage) to a module with a `SPEC`."""

MODELS = {("LlamaForCausalLM", "thinker"): "custom_model.llama"}
