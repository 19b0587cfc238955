"""Z-Image and Z-Image-Turbo: pictures from text (Apache-2.0; text encoder, diffusion transformer, VAE)."""
