"""What the families of picture models share: packed denoising, the schedule of noise, and the stages around them."""
