"""What zeroshard's HTML pages have in common: one file each, which opens offline and loads nothing."""
