// Command dev builds Garboard and tests it; most of the Makefile's targets are its subcommands. gbctl makes development
// clusters.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/garboard-os/garboard/image"
	"github.com/spf13/cobra"
)

func main() {
	// The first Ctrl-C ends the work in order; the second ends the program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	root := &cobra.Command{
		Use:           "dev",
		Short:         "Build Garboard, look at development clusters, test",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(
		setupCommand(), buildCommand(), imagesCommand(), extensionsCommand(), releaseCommand(), testCommand(), testLongCommand(), fuzzCommand(), outdatedCommand(), kubectlCommand(),
	)
	root.AddCommand(umlCommands()...)
	err := root.ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	if exit, ok := errors.AsType[exitCode](err); ok {
		os.Exit(int(exit))
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "interrupted")
		os.Exit(130) // 128 + SIGINT, as shells count
	}
	fmt.Fprintln(os.Stderr, "error:", err)
	os.Exit(1)
}

// exitCode is the status of a program that spoke for itself.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// repository is the checkout that the program was started in.
func repository() (string, error) {
	return image.Checkout(".")
}
