package main

import (
	"os"

	"github.com/garboard-os/garboard/tools/testing/uml"
	"github.com/spf13/cobra"
)

// umlCommands are for go test -exec, and what that calls. People call none of them.
func umlCommands() []*cobra.Command {
	each := func(use, short string, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
		// The arguments are another program's.
		return &cobra.Command{Use: use, Short: short, Hidden: true, DisableFlagParsing: true, RunE: run}
	}
	return []*cobra.Command{
		each("uml PROGRAM [ARG...]", "Run a test program in a User Mode Linux guest", func(cmd *cobra.Command, args []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			code, err := uml.Run(cmd.Context(), self, args, cmd.OutOrStdout())
			return status(code, err)
		}),
		each(uml.KeepCommand, "Keep a guest's processes together", func(_ *cobra.Command, args []string) error {
			return status(uml.Keep(args))
		}),
		each(uml.InitCommand, "Be a guest's first process", func(*cobra.Command, []string) error { return uml.Init() }),
		each(uml.ModprobeCommand, "Load what a guest's kernel asks for", func(_ *cobra.Command, args []string) error {
			return uml.Modprobe(args)
		}),
	}
}

func status(code int, err error) error {
	if err != nil || code == 0 {
		return err
	}
	return exitCode(code)
}
