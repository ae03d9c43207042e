"""The HTML page.

Modules, in reading order:

    report_page  the report's HTML page
    markup       HTML and SVG from values, escaped; rows and axes
    style        colours and the style sheet
    memory       the section on memory, and its bars
    step         the section on the step, and the spans that it draws
"""
