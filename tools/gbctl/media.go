package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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
	return group("media", a.mediaBuildCommand(buildParts), a.mediaServeCommand())
}

// mediaBuildCommand puts together what parts builds.
func (a *app) mediaBuildCommand(parts partsBuilder) *cobra.Command {
	var output, source, flavour, sign string
	var added mediaParts
	cmd := command("build ["+strings.Join(media.Kinds, "|")+"]", func(cmd *cobra.Command, given []string) error {
		kind := media.ISO
		if len(given) > 0 {
			kind = given[0]
		}
		if output == "" {
			output = defaultFiles[kind]
		}
		if err := added.read(a, cmd.ErrOrStderr(), media.Carries(kind)); err != nil {
			return err
		}
		o := added.Options
		err := parts(cmd, source, flavour, &o)
		if err == nil {
			err = o.CheckSize(func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) })
		}
		if err != nil {
			return err
		}
		if sign != "" {
			return signedMedium(cmd, o, sign, medium{kind, output})
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "writing %s\n", output)
		if err := o.Build(cmd.Context(), kind, output); err != nil {
			return err
		}
		fmt.Fprintln(cmd.OutOrStdout(), output)
		return nil
	})
	cmd.Args = cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs)
	cmd.ValidArgs = media.Kinds
	f := cmd.Flags()
	f.StringVarP(&output, outputFile, "O", "", "file to write, or the directory for pxe (default garboard.iso, garboard.raw.zst, garboard.efi, pxe or garboard-installer.tar)")
	flavourFlag(cmd, &flavour)
	added.add(f, a.err, &added.Args)
	signVar(f, &sign)
	renamed(cmd, "output", "o", outputFile)
	f.StringVar(&source, "source", ".", "checkout of Garboard to build from, or a directory in it")
	return cmd
}

// signedMedium makes a medium whose system is signed for Secure Boot. That system installs a signed boot loader: so it
// is another one than that of the build.
func signedMedium(cmd *cobra.Command, o media.Options, keys string, to medium) (err error) {
	work, err := os.MkdirTemp("", "garboard-media-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	system, installer := o, filepath.Join(work, "installer.tar")
	system.Config, system.Images = nil, ""
	if err := system.Build(cmd.Context(), media.InstallerKind, installer); err != nil {
		return err
	}
	b := imageBuild{from: installer, sign: keys, mediaParts: mediaParts{Options: media.Options{Key: o.Key, Config: o.Config, Images: o.Images}}}
	return b.run(cmd.Context(), []medium{to}, func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }, func(path string) { fmt.Fprintln(cmd.OutOrStdout(), path) })
}

// defaultFiles are where media are written, by kind.
var defaultFiles = map[string]string{media.ISO: "garboard.iso", media.UKI: media.UKIFile, media.PXE: "pxe", media.InstallerKind: "garboard-installer.tar", media.Disk: "garboard.raw.zst"}

// workerPods are the images of a default cluster's pods on its workers. They are in the configuration of control
// planes.
var workerPods = []string{config.DefaultProxyImage, config.DefaultFlannelImage, config.DefaultCoreDNSImage}

// mediaParts are the flags of what is added to a medium.
type mediaParts struct {
	media.Options
	config     string
	incomplete bool
}

func (p *mediaParts) add(f *pflag.FlagSet, notes io.Writer, args *[]string) {
	f.StringVar(&p.config, "config", "", "machine configuration to put into an iso or disk: the machine uses it at its first boot")
	f.StringVar(&p.Images, "images", "", "file of 'gbctl images bundle' to put into an iso or disk: the machine takes its images from it, and needs no registry for them")
	f.BoolVar(&p.incomplete, "incomplete", false, "accept --images without some of the images that a node needs, such as for an upgrade")
	f.StringVar(&p.Microcode, "microcode", "", "directory with microcode for processors, such as /lib/firmware: its intel-ucode and amd-ucode")
	kernelArgsVar(f, notes, args)
}

// read checks what is put into a medium that carries it, and reads the configuration.
func (p *mediaParts) read(a *app, notes io.Writer, carries bool) (err error) {
	needed, wanted := config.DefaultImages(), []string(nil)
	if p.config != "" {
		if !carries {
			return usagef("--config: only an iso and a disk can have a configuration; otherwise, use --extra-kernel-arg garboard.config=URL")
		}
		var c *config.Config
		if c, p.Config, err = a.readConfig(p.config, config.Load); err != nil {
			return err
		}
		if needed = c.Images(); c.Machine.Type == config.Worker {
			wanted = workerPods
		}
	}
	if p.Images == "" {
		return nil
	}
	if !carries {
		return usagef("--images: only an iso and a disk can have images")
	}
	archive, err := registry.OpenArchive(p.Images)
	if err != nil {
		return err
	}
	defer archive.Close()
	missing, err := imagebundle.Missing(archive, needed)
	if err != nil {
		return fmt.Errorf("--images: %s: %w", p.Images, err)
	}
	if len(missing) > 0 && !p.incomplete {
		return usagef("--images: %s lacks what a node needs: %s; add it with 'gbctl images bundle', or use --incomplete", p.Images, strings.Join(missing, ", "))
	}
	if missing, err = imagebundle.Missing(archive, wanted); err == nil && len(missing) > 0 {
		fmt.Fprintf(notes, "note: %s lacks %s, which workers of a default cluster run pods with: the configuration of a control plane says what yours do\n", p.Images, strings.Join(missing, ", "))
	}
	return err
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

// kernelArgsVar adds a flag with arguments of the kernel.
func kernelArgsVar(f *pflag.FlagSet, notes io.Writer, args *[]string) {
	f.Func("extra-kernel-arg", "argument to add to the kernel's command line, such as console=ttyS1; repeatable", func(arg string) error {
		*args = append(*args, arg)
		if shown := config.RedactText(arg); shown != arg {
			fmt.Fprintf(notes, "%s every pod can read the arguments of the kernel, and this one has credentials in it: %s; docs/media.md has better places\n", painted(notes, "warning:"), shown)
		}
		return config.KernelArg(arg)
	})
}
