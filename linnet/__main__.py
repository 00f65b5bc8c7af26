from linnet.cli import main

main()
