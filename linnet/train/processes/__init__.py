"""One process per device: on this machine (`launch`) or on a Ray cluster (`cluster`)."""
