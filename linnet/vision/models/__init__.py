"""Models of images: classifiers, denoisers, and their recipes."""
