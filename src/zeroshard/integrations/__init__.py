"""zeroshard inside other training tools. One module per tool, which imports the tool; the core imports none of them."""
