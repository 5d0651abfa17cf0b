// Command gbctl operates nodes of Garboard from elsewhere, over their machine
// API. Each command asks all the nodes that it was given at the same time, prints
// the answers in the order in which the nodes were named, and tells at the end,
// with its exit code too, which nodes had none. What a command does is done by
// the node: gbctl asks, shows and explains.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run()) }

func run() int {
	// The first Ctrl-C ends the work in order; the second ends the program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr}
	root := a.rootCommand()
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !a.running {
		err = &exitError{codeUsage, fmt.Errorf("%w\n'%s --help' shows how it is used", err, cmd.CommandPath())}
	}
	return a.finish(ctx, err)
}

const rootLong = `gbctl operates the nodes of a Garboard cluster.

Whom to talk to, and as whom, is in the client configuration that
'gbctl gen config' makes: $GARBOARDCONFIG, or else ~/.garboard/config.
-n names the nodes that a command is for. Without it, these are the nodes of the
context, or else the first of its endpoints that answers.`

const rootExample = `  gbctl gen config home https://10.5.0.2:6443      make a cluster's files
  gbctl -n 10.5.0.2 apply-config --insecure -f controlplane.yaml
  gbctl -n 10.5.0.2 health                         what is up, and what waits
  gbctl -n 10.5.0.2,10.5.0.3 services
  gbctl -n 10.5.0.2 get staticpods -o yaml
  gbctl kubeconfig                                 then use kubectl`

// Groups of commands, in the order of the help.
const (
	groupLook   = "look"
	groupConfig = "config"
	groupAct    = "act"
	groupClient = "client"
)

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "gbctl",
		Short:         "Operate Garboard nodes",
		Long:          rootLong,
		Example:       rootExample,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			// cobra itself looks at these only after this function.
			if err := errors.Join(cmd.ValidateRequiredFlags(), cmd.ValidateFlagGroups()); err != nil {
				return err
			}
			// What fails from here on isn't a matter of how the command was typed.
			if err := a.checkFlags(cmd); err != nil {
				return err
			}
			a.running = true
			return nil
		},
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	a.globalFlags(root)
	root.AddGroup(
		&cobra.Group{ID: groupLook, Title: "Look at nodes:"},
		&cobra.Group{ID: groupConfig, Title: "Configure nodes:"},
		&cobra.Group{ID: groupAct, Title: "Act on nodes:"},
		&cobra.Group{ID: groupClient, Title: "Without a node:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add(groupLook, a.healthCommand(), a.servicesCommand(), a.serviceCommand(), a.eventsCommand(), a.logsCommand(), a.dmesgCommand(),
		a.getCommand(), a.inspectCommand(), a.containersCommand(), a.imagesCommand(), a.bootChartCommand(), a.processesCommand(), a.memoryCommand(),
		a.mountsCommand(), a.disksCommand(), a.netstatCommand(), a.timeCommand(), a.lsCommand(), a.readCommand(), a.copyCommand(), a.versionCommand())
	add(groupAct, a.bootstrapCommand(), a.etcdCommand(), a.operationCommand())
	add(groupLook, a.doctorCommand(), a.supportCommand(), a.dashboardCommand())
	add(groupConfig, a.applyConfigCommand("apply-config"), a.applyCommand(), a.editCommand(), a.patchCommand(), a.configCommand())
	add(groupAct, a.kubeconfigCommand(), a.rebootCommand(), a.shutdownCommand(), a.resetCommand())
	add(groupClient, genCommand(), a.validateCommand(), a.schemaCommand(), a.clusterCommand())
	root.SetHelpCommandGroupID(groupClient)
	root.SetCompletionCommandGroupID(groupClient)
	root.AddCommand(exitCodesTopic())
	return root
}
