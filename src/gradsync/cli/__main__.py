from gradsync.cli import main

main()
