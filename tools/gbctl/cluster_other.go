//go:build !linux

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func (a *app) clusterCommand() *cobra.Command {
	return &cobra.Command{
		Use: "cluster", Short: "Run development clusters on this machine (Linux only)", DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("clusters on this machine need Linux: their nodes are made with its namespaces, or by its KVM; all other commands work here")
		},
	}
}
