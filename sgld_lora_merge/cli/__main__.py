"""``python -m sgld_lora_merge.cli``, where the script is not on the path."""

from sgld_lora_merge.cli.commands import main

if __name__ == "__main__":
    main()
