def pytest_addoption(parser):
    parser.addoption("--cases", type=float, default=1.0, help="share of the cases to run")
