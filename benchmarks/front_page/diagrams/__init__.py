"""The diagrams of the pages, one file each: boxes, arrows and text in the colours of a scheme."""
