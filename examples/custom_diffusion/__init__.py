"""A custom picture model as a plugin: maps (class in model_index.json, stage) to a module with a `SPEC`."""

MODELS = {("DDIMPipeline", "painter"): "custom_diffusion.painter"}
LABELS = ("circle", "square", "star")  # what the model was made to paint
