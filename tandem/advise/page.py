"""stub"""


def page(study):
    return ""
