"""Write the results of a verb as a JSON report and as an HTML page."""
