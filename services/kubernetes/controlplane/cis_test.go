package controlplane

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/cis"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// The files that the controllers write on a control plane, with all certificates and keys.
func TestCIS(t *testing.T) {
	f := start(t, testConfig(t))
	f.etcd(true)
	put(t, os.WriteFile(f.path("subnet.env"), []byte("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\n"), 0o600))
	for _, path := range append([]string{f.path("cni", cniFile)}, f.file(apiServer), f.file(controllerManager), f.file(scheduler)) {
		eventually.That(t, patience, path, func() error { _, err := os.Stat(path); return err })
	}
	for _, id := range []string{secrets.EtcdID, secrets.KubeletID} {
		eventually.That(t, patience, "secrets of "+id, func() error { _, err := secrets.Statuses.Get(f.store, id); return err })
	}
	node := cis.Node{Commands: map[string][]string{}, Files: map[string]cis.File{}}
	for here, there := range map[string]string{"static-pods": boot.StaticPodsDir, "files": filesDir, "secrets": boot.SecretsDir, "cni": boot.CNIConfDir} {
		put(t, filepath.WalkDir(f.path(here), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return err
			}
			data, err := os.ReadFile(path)
			foreign := int(info.Sys().(*syscall.Stat_t).Uid) != os.Geteuid()
			node.Files[there+strings.TrimPrefix(path, f.path(here))] = cis.File{Mode: info.Mode(), Foreign: foreign, Content: data}
			return err
		}))
	}
	for _, program := range programs {
		var pod map[string]any
		put(t, yaml.Unmarshal(node.Files[boot.StaticPodsDir+"/"+filepath.Base(f.file(program))].Content, &pod))
		for _, arg := range kubeclient.Object(pod).List("spec", "containers")[0]["command"].([]any) {
			node.Commands[program] = append(node.Commands[program], arg.(string))
		}
	}
	cis.Check(t, "control plane", node)
}
