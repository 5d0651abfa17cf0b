package udev

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"golang.org/x/sys/unix"
)

// A module gets its parameters of the kernel's command line, whoever asks for it.
func TestParametersOfTheCommandLine(t *testing.T) {
	t.Parallel()
	k := newFakeKernel(t)
	k.Parameters(boot.ParseCmdline(`quiet xfs.a=1 xfs.flag virtio-net.text="two words" .b=1 c.=1 garboard.config=http://a`))
	for _, name := range []string{"xfs", "virtio_net"} {
		if err := k.Load(name); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"xfs": "a=1 flag", "virtio_net": `"text=two words"`} {
		if got := k.given[name]; got != want {
			t.Errorf("%s has got %q, want %q", name, got, want)
		}
	}
}

// The modules of the configuration are loaded with their parameters, and what can't be loaded is named, and tried
// again.
func TestConfiguredModules(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		k.refuse["virtio_net"] = unix.ENODEV
		store := resource.NewStore()
		run(t, store, &configured{mode: boot.Machine, open: func() (*Modules, error) { return k.Modules, nil }})
		configure := func(modules ...config.KernelModule) {
			c := &config.Config{Machine: config.Machine{Kernel: config.Kernel{Modules: modules}}}
			if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		configure(config.KernelModule{Name: "xfs", Parameters: []string{"a=1", "flag"}}, config.KernelModule{Name: "virtio-net"}, config.KernelModule{Name: "nothing"}, config.KernelModule{Name: "ext4"})
		if got := k.given["xfs"]; got != "a=1 flag" {
			t.Errorf("xfs has got %q", got)
		}
		states(t, store, map[string]string{"xfs": "", "virtio-net": "load module virtio_net: no such device", "nothing": "load module nothing: " + ErrNoModule.Error(), "ext4": ""})
		k.mu.Lock()
		delete(k.refuse, "virtio_net")
		k.mu.Unlock()
		time.Sleep(retryModules + time.Second) // of the bubble
		synctest.Wait()
		states(t, store, map[string]string{"xfs": "", "virtio-net": "", "nothing": "load module nothing: " + ErrNoModule.Error(), "ext4": ""})
		configure()
		states(t, store, map[string]string{})
	})
}

// Parameters come too late for a module that the kernel has already.
func TestParametersOfALoadedModule(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		k.refuse["xfs"], k.refuse["virtio_net"] = unix.EEXIST, unix.EEXIST
		store := resource.NewStore()
		run(t, store, &configured{mode: boot.Machine, open: func() (*Modules, error) { return k.Modules, nil }})
		c := &config.Config{Machine: config.Machine{Kernel: config.Kernel{Modules: []config.KernelModule{{Name: "xfs", Parameters: []string{"a=1"}}, {Name: "virtio-net"}}}}}
		if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		states(t, store, map[string]string{"virtio-net": "",
			"xfs": "was loaded before the configuration was known, without these parameters: use machine.install.extraKernelArgs, for example xfs.a=1"})
	})
}

func TestModulesOfAContainer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		run(t, store, &configured{mode: boot.Container})
		c := &config.Config{Machine: config.Machine{Kernel: config.Kernel{Modules: []config.KernelModule{{Name: "xfs"}}}}}
		if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		states(t, store, map[string]string{"xfs": "a container has the modules of its host"})
	})
}

// run runs a controller until the test ends.
func run(t *testing.T, store *resource.Store, c *configured) {
	t.Helper()
	runtime, err := resource.NewRuntime(store, slog.New(slog.DiscardHandler), c.controller())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runtime.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
}

// states compares the problem of each module; "": it is loaded.
func states(t *testing.T, store *resource.Store, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	for _, o := range ModuleStatuses.List(store) {
		if got[o.ID] = o.Spec.Problem; o.Spec.Loaded != (o.Spec.Problem == "" || strings.HasPrefix(o.Spec.Problem, "was loaded ")) {
			t.Errorf("%s is %+v", o.ID, o.Spec)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("the modules are %s, want %s", fmt.Sprint(got), fmt.Sprint(want))
	}
}
