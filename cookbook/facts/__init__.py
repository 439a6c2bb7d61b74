"""Facts of models, without torch: their files, and which types can be packed, divided and cut into stages."""
