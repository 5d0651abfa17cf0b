// Command gbctl operates Garboard nodes remotely, over their machine API. It sends a
// request to all given nodes at the same time and prints the answers in the order in
// which the nodes were given. At the end it reports the nodes that failed, also with its
// exit code. The node does the work: gbctl sends requests, shows results and explains
// errors.
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/garboard-os/garboard/boot"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run()) }

func run() int {
	// The first Ctrl-C ends the command in an orderly way; the second one kills the
	// program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, args: os.Args[1:]}
	root := a.rootCommand()
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !a.running && !errors.As(err, new(*exitError)) {
		err = exitf(codeUsage, "%w\n'%s --help' shows the usage", err, cmd.CommandPath())
	}
	return a.finish(ctx, err)
}

// Groups of commands, in the order in which the help lists them.
const (
	groupInspect = "inspect"
	groupConfig  = "config"
	groupOperate = "operate"
	groupClient  = "client"
)

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "gbctl",
		Version:       boot.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			a.formerNames(cmd)
			// cobra checks these only after this function.
			if err := errors.Join(missingFlags(cmd), cmd.ValidateFlagGroups()); err != nil {
				return err
			}
			// Later errors aren't usage errors.
			if err := a.checkFlags(cmd); err != nil {
				return err
			}
			a.running = true
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(a.flagError)
	root.SetOut(a.out)
	root.SetErr(a.err)
	a.globalFlags(root)
	root.AddGroup(
		&cobra.Group{ID: groupInspect, Title: "Inspect nodes:"},
		&cobra.Group{ID: groupConfig, Title: "Configure nodes:"},
		&cobra.Group{ID: groupOperate, Title: "Operate nodes:"},
		&cobra.Group{ID: groupClient, Title: "Commands that work without a node:"},
	)
	addTo(root, groupInspect, a.healthCommand(), a.servicesCommand(), a.serviceCommand(), a.eventsCommand(), a.logsCommand(), a.dmesgCommand(),
		a.getCommand(), a.inspectCommand(), a.containersCommand(), a.imagesCommand(), a.bootChartCommand(), a.processesCommand(), a.memoryCommand(),
		a.mountsCommand(), a.disksCommand(), a.netstatCommand(), a.timeCommand(), a.lsCommand(), a.readCommand(), a.copyCommand(), a.versionCommand())
	addTo(root, groupInspect, a.doctorCommand(), a.metricsCommand(), a.supportCommand(), a.dashboardCommand(), a.rebootsCommand(), a.netcheckCommand(), a.pcapCommand())
	addTo(root, groupConfig, a.applyConfigCommand("apply-config"), ofMachineConfig("apply", a.applyConfigCommand), a.editCommand(), ofMachineConfig("patch", a.patchCommand), a.configCommand())
	addTo(root, groupOperate, a.bootstrapCommand(), a.etcdCommand(), a.operationCommand(), a.kubeconfigCommand(), a.tokenCommand(), a.recoveryKeyCommand(), a.unlockCommand(), a.resetCommand(), a.encryptCommand(), a.attestCommand(), a.upgradeK8sCommand(), a.convertK8sCommand(), a.rotateCACommand(), a.readdressCommand(), a.setEndpointCommand())
	addTo(root, groupOperate, ofEach(restarts, a.restartCommand)...)
	addTo(root, groupClient, manCommand(), genCommand(), a.validateCommand(), a.schemaCommand(), a.mediaCommand(), a.imageCommand(), a.clusterCommand())
	root.SetHelpCommandGroupID(groupClient)
	root.SetCompletionCommandGroupID(groupClient)
	root.AddCommand(&cobra.Command{Use: "exit-codes"}) // a topic of the help
	setHelp(root, readHelp())
	a.explainUsage(root)
	return root
}

// addTo adds commands to a group in the help of a command.
func addTo(cmd *cobra.Command, group string, commands ...*cobra.Command) {
	for _, c := range commands {
		c.GroupID = group
	}
	cmd.AddCommand(commands...)
}
