package main

import (
	"maps"
	"slices"

	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
)

// Completion reads only local files: it must not hang because a node is down.

func (a *app) completeContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	path, err := a.path()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	config, err := client.Load(path)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Sorted(maps.Keys(config.Contexts)), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeNodes(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	c, err := a.access()
	if err != nil || c == nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Concat(c.Nodes, c.Endpoints), cobra.ShellCompDirectiveNoFileComp
}
