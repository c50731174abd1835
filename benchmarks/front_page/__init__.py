"""Draw the pictures of README.md and the site, as SVG files in docs/pictures.

`python -m benchmarks.front_page` draws the comparison and the diagrams, each for light and dark pages. The
comparison reads its numbers from the pages about speed, so draw it again after `make bench`.

`python -m benchmarks.front_page.demo` records `kpl demo` again, for a minute.
"""
