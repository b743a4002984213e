def gallery_page(chapters): return "# Gallery\n\ntbd\n"
def results_page(): return "# Results\n\ntbd\n"
