"""Models of images: tokens of images (`patches`), classifiers, and denoisers with their diffusion process."""
