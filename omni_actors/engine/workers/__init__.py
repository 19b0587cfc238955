"""What computes: vLLM's workers and model runners, and ours for diffusion."""
