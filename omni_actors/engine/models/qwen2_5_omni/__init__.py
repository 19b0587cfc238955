"""The parts of Qwen2.5-Omni's vocoder, on plain torch and Triton: chunks, diffusion transformer, BigVGAN, kernels."""
