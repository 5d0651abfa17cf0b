package main

import (
	"errors"
	"fmt"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/schema"
	"github.com/spf13/cobra"
)

func (a *app) validateCommand() *cobra.Command {
	var file, mode string
	cmd := command("validate --config FILE", func(_ *cobra.Command, args []string) error {
		if len(args) == 1 && file == "" {
			file = args[0]
		} else if len(args) == 1 || file == "" {
			return usagef("give exactly one configuration: --config FILE")
		}
		return a.validate(file, loaders[mode])
	})
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVarP(&file, "config", "c", "", "file with the configuration, or - for standard input")
	cmd.Flags().StringVarP(&file, "file", "f", "", "same as --config")
	choiceFlag(cmd, &mode, "mode", "", "what the node is: machine or container", "machine", "container")
	return cmd
}

type loader func(name string, text []byte) (*config.Config, []config.Warning, error)

// loaders check configurations for each kind of node.
var loaders = map[string]loader{"machine": config.Load, "container": config.LoadForContainer}

func (a *app) validate(file string, load loader) error {
	loaded, _, err := a.readConfig(file, load)
	if err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s is a valid configuration of type %s\n", file, loaded.Machine.Type)
	return nil
}

// readConfig reads a configuration, and shows what is wrong with it.
func (a *app) readConfig(file string, load loader) (*config.Config, []byte, error) {
	text, err := a.readInput(file)
	if err != nil {
		return nil, nil, err
	}
	loaded, warnings, err := load(file, text)
	if err == nil {
		err = config.CheckManifests(file, text, loaded, nil)
	}
	for _, w := range warnings {
		fmt.Fprintf(a.err, "%s %s\n", painted(a.err, "warning:"), w)
	}
	if problems, ok := errors.AsType[config.Problems](err); ok {
		fmt.Fprintln(a.err, problems)
		return nil, nil, &exitError{codeRefused, nil}
	}
	return loaded, text, err
}

func (a *app) schemaCommand() *cobra.Command {
	return command("schema", func(*cobra.Command, []string) error {
		text, err := schema.JSON()
		if err != nil {
			return err
		}
		_, err = a.out.Write(text)
		return err
	})
}
