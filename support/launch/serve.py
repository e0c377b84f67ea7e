"""The ``sglang`` command as a file: the engine spawns its workers, which import it again."""

if __name__ == "__main__":
    from sglang.cli.main import main

    main()
