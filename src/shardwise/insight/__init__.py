"""Who holds what, what a training needs, what every rank did: reports, plans and timelines."""
