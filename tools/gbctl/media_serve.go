package main

import (
	"fmt"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/tools/gbctl/netboot"
	"github.com/spf13/cobra"
)

// defaultHTTPPort is often free, and above those that need root.
const defaultHTTPPort = 8080

// serveFlags are the flags of media serve.
type serveFlags struct {
	on, dir, source, flavour string
	httpPort                 int
	configs                  netboot.Configs
	args                     []string
}

func (a *app) mediaServeCommand() *cobra.Command {
	var o serveFlags
	cmd := command("serve", func(cmd *cobra.Command, _ []string) error { return a.serveMedia(cmd, o) })
	f := cmd.Flags()
	f.StringVar(&o.on, "interface", "", "network interface of the machines, or its IPv4 address (default: the only one)")
	f.StringVar(&o.dir, "dir", "", "directory that 'gbctl media build pxe' has made (default: build the files, and keep them in memory)")
	f.StringVar(&o.configs.File, "config", "", "configuration of all machines that boot here")
	f.StringVar(&o.configs.Dir, "config-dir", "", "directory with a configuration for each machine, such as 52-54-00-12-34-56.yaml, and default.yaml")
	f.IntVar(&o.httpPort, "http-port", defaultHTTPPort, "TCP port for HTTP")
	kernelArgsVar(f, a.err, &o.args)
	flavourFlag(cmd, &o.flavour)
	f.StringVar(&o.source, "source", ".", "checkout of Garboard to build from, or a directory in it")
	cmd.MarkFlagsMutuallyExclusive("config", "config-dir")
	cmd.MarkFlagsMutuallyExclusive("dir", "source")
	cmd.MarkFlagsMutuallyExclusive("dir", "flavour")
	return cmd
}

// serveMedia opens the ports before it builds anything, so that errors that a user can correct come at once.
func (a *app) serveMedia(cmd *cobra.Command, o serveFlags) error {
	serve := netboot.Options{HTTPPort: o.httpPort, Out: cmd.OutOrStdout()}
	if o.configs != (netboot.Configs{}) {
		if err := a.checkConfigs(&o.configs); err != nil {
			return err
		}
		serve.Configs = &o.configs
	}
	on, err := netboot.FindInterface(o.on)
	if err != nil {
		return usagef("--interface: %w", err)
	}
	serve.On = on
	server, err := netboot.New(cmd.Context(), serve)
	if err != nil {
		return err
	}
	defer server.Close()
	files, err := a.networkFiles(cmd, o)
	if err != nil {
		return err
	}
	args := o.args
	if serve.Configs != nil {
		args = append(args, server.ConfigArgument())
	}
	if err := files.AddArgs(args...); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "machines in the network of %s (%s) can boot now: from the network card, in BIOS or UEFI, or by UEFI HTTP boot. Ctrl-C ends it\n", on.Name, on.Address)
	return server.Run(cmd.Context(), files)
}

func (a *app) networkFiles(cmd *cobra.Command, o serveFlags) (media.NetworkFiles, error) {
	if o.dir != "" {
		return media.ReadNetworkFiles(o.dir)
	}
	var parts media.Options
	if err := buildParts(cmd, o.source, o.flavour, &parts); err != nil {
		return nil, err
	}
	return parts.NetworkFiles()
}

// checkConfigs reports problems before a machine has them.
func (a *app) checkConfigs(c *netboot.Configs) error {
	paths, err := c.Paths()
	if err != nil {
		return err
	}
	if len(paths) == 0 {
		fmt.Fprintf(a.err, "%s %s has no configuration (NAME.yaml) yet\n", painted(a.err, "warning:"), c.Dir)
	}
	for _, path := range paths {
		if _, _, err := a.readConfig(path, config.Load); err != nil {
			return err
		}
		warning, err := netboot.Warning(path)
		if err != nil {
			return err
		}
		if warning != "" {
			fmt.Fprintf(a.err, "%s %s\n", painted(a.err, "warning:"), warning)
		}
	}
	return nil
}
