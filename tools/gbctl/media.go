package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/kernel"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func (a *app) mediaCommand() *cobra.Command {
	return group(&cobra.Command{Use: "media"}, a.mediaBuildCommand(buildParts), a.mediaServeCommand())
}

// mediaBuildCommand puts together what parts builds.
func (a *app) mediaBuildCommand(parts partsBuilder) *cobra.Command {
	var output, source, flavour, configFile, microcode, images string
	var args []string
	var incomplete bool
	cmd := &cobra.Command{
		Use:       "build [" + strings.Join(media.Kinds, "|") + "]",
		Args:      cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: media.Kinds,
		RunE: func(cmd *cobra.Command, given []string) error {
			kind := media.ISO
			if len(given) > 0 {
				kind = given[0]
			}
			if output == "" {
				output = defaultFiles[kind]
			}
			o := media.Options{Args: args, Microcode: microcode, Images: images}
			var err error
			if o.Config, err = a.addedParts(cmd.ErrOrStderr(), configFile, images, media.Carries(kind), incomplete); err != nil {
				return err
			}
			if err = parts(cmd, source, flavour, &o); err == nil {
				err = o.CheckSize(func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) })
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "writing %s\n", output)
			if err := o.Build(cmd.Context(), kind, output); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), output)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&output, outputFile, "O", "", "file to write, or the directory for pxe (default garboard.iso, garboard.raw.zst, garboard.efi, pxe or garboard-installer.tar)")
	flavourFlag(cmd, &flavour)
	f.StringVar(&configFile, "config", "", "machine configuration to put into the iso or disk: the machine uses it at its first boot")
	f.StringVar(&images, "images", "", "file of 'gbctl images bundle' to put into the iso or disk: the machine takes its images from it, and needs no registry for them")
	f.BoolVar(&incomplete, "incomplete", false, "accept --images without some of the images that a node needs, such as for an upgrade")
	f.StringVar(&microcode, "microcode", "", "directory with microcode for processors, such as /lib/firmware: its intel-ucode and amd-ucode")
	renamed(cmd, "output", "o", outputFile)
	kernelArgsVar(f, a.err, &args)
	f.StringVar(&source, "source", ".", "checkout of Garboard to build from, or a directory in it")
	return cmd
}

// defaultFiles are where media are written, by kind.
var defaultFiles = map[string]string{media.ISO: "garboard.iso", media.UKI: media.UKIFile, media.PXE: "pxe", media.InstallerKind: "garboard-installer.tar", media.Disk: "garboard.raw.zst"}

// workerPods are the images of a default cluster's pods on its workers. They are in the configuration of control
// planes.
var workerPods = []string{config.DefaultProxyImage, config.DefaultFlannelImage, config.DefaultCoreDNSImage}

// addedParts checks what is put into a medium that carries it, and reads the configuration.
func (a *app) addedParts(notes io.Writer, configFile, images string, carries, incomplete bool) (text []byte, err error) {
	needed, wanted := config.DefaultImages(), []string(nil)
	if configFile != "" {
		if !carries {
			return nil, usagef("--config: only an iso and a disk can have a configuration; otherwise, use --extra-kernel-arg garboard.config=URL")
		}
		var c *config.Config
		if c, text, err = a.readConfig(configFile, config.Load); err != nil {
			return nil, err
		}
		if needed = c.Images(); c.Machine.Type == config.Worker {
			wanted = workerPods
		}
	}
	if images == "" {
		return text, nil
	}
	if !carries {
		return nil, usagef("--images: only an iso and a disk can have images")
	}
	archive, err := registry.OpenArchive(images)
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	missing, err := imagebundle.Missing(archive, needed)
	if err != nil {
		return nil, fmt.Errorf("--images: %s: %w", images, err)
	}
	if len(missing) > 0 && !incomplete {
		return nil, usagef("--images: %s lacks what a node needs: %s; add it with 'gbctl images bundle', or use --incomplete", images, strings.Join(missing, ", "))
	}
	if missing, err = imagebundle.Missing(archive, wanted); err == nil && len(missing) > 0 {
		fmt.Fprintf(notes, "note: %s lacks %s, which workers of a default cluster run pods with: the configuration of a control plane says what yours do\n", images, strings.Join(missing, ", "))
	}
	return text, err
}

func flavourFlag(cmd *cobra.Command, to *string) {
	choiceFlag(cmd, to, "flavour", "", "kernel: generic, for all machines, or cloud, which is smaller and only for virtual machines", string(kernel.Generic), string(kernel.Cloud))
}

// A partsBuilder builds what a medium is made of.
type partsBuilder func(cmd *cobra.Command, source, flavour string, o *media.Options) error

// buildParts builds it from a checkout.
func buildParts(cmd *cobra.Command, source, flavour string, o *media.Options) error {
	checkout, err := image.Checkout(source)
	if err != nil {
		return fmt.Errorf("%w; use --source", err)
	}
	made, err := image.BuildMedia(cmd.Context(), checkout, cmd.ErrOrStderr(), image.Flavour(flavour))
	if err != nil {
		return err
	}
	*o = made.With(*o)
	return nil
}

// kernelArgs are those of a flag that is repeated.
type kernelArgs struct {
	args  *[]string
	notes io.Writer
}

func kernelArgsVar(f *pflag.FlagSet, notes io.Writer, args *[]string) {
	f.Var(kernelArgs{args, notes}, "extra-kernel-arg", "argument to add to the kernel's command line, such as console=ttyS1; repeatable")
}

func (k kernelArgs) String() string { return "" }
func (k kernelArgs) Type() string   { return "stringArray" }

func (k kernelArgs) Set(arg string) error {
	*k.args = append(*k.args, arg)
	if shown := config.RedactText(arg); shown != arg {
		fmt.Fprintf(k.notes, "%s every pod can read the arguments of the kernel, and this one has credentials in it: %s; docs/media.md has better places\n", painted(k.notes, "warning:"), shown)
	}
	return config.KernelArg(arg)
}
