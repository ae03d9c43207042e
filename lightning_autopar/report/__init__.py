"""What planning found, as values, text, page. Knows not how it is found.

Modules, in reading order:

    report                  Report with its views, NothingFits
    table                   the report as text
    predicted_and_measured  predicted against measured
    run_history             what happened to a run, as values and text
    page/                   the HTML page
"""
