package secrets

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/resource"
)

const (
	fileMode = 0o600 // the programs run as root, without capabilities
	dirMode  = 0o700
	// versionSize: half a SHA-256 is more than enough to see that something changed.
	versionSize = 16
)

// KubernetesDir is the folder, in the secrets folder, with one folder for each
// program (acceptance S-340).
const KubernetesDir = "kubernetes"

// FilesController writes the control plane's secrets where its programs read them.
type FilesController struct{ dir string }

// Name implements resource.Controller.
func (*FilesController) Name() string { return "secrets.FilesController" }

// Inputs implements resource.Controller.
func (*FilesController) Inputs() []resource.Input {
	return []resource.Input{{Type: Kubernetes.Type(), ID: KubernetesID}}
}

// Outputs implements resource.Controller.
func (*FilesController) Outputs() []string { return []string{Statuses.Type()} }

// Reconcile implements resource.Controller.
func (c *FilesController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	o, err := Kubernetes.Get(v, KubernetesID)
	if err != nil {
		return 0, ignoreNotFound(err)
	}
	files, err := Files(o.Spec)
	if err != nil {
		return 0, err
	}
	if err := writeAll(filepath.Join(c.dir, KubernetesDir), files); err != nil {
		return 0, err
	}
	return 0, Statuses.Put(v, KubernetesID, StatusSpec{Version: version(files)})
}

// Files are the programs' secrets: path below the folder, content.
func Files(s KubernetesSpec) (map[string][]byte, error) {
	encryption, err := encryptionConfig(s.EncryptionKey)
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{
		"kube-apiserver/ca.crt":                       s.CA.Crt,
		"kube-apiserver/apiserver.crt":                s.APIServer.Crt,
		"kube-apiserver/apiserver.key":                s.APIServer.Key,
		"kube-apiserver/apiserver-kubelet-client.crt": s.KubeletClient.Crt,
		"kube-apiserver/apiserver-kubelet-client.key": s.KubeletClient.Key,
		"kube-apiserver/etcd-client-ca.crt":           s.EtcdCA,
		"kube-apiserver/etcd-client.crt":              s.EtcdClient.Crt,
		"kube-apiserver/etcd-client.key":              s.EtcdClient.Key,
		"kube-apiserver/aggregator-ca.crt":            s.AggregatorCA,
		"kube-apiserver/front-proxy-client.crt":       s.FrontProxy.Crt,
		"kube-apiserver/front-proxy-client.key":       s.FrontProxy.Key,
		"kube-apiserver/service-account.pub":          s.ServiceAccount.Crt,
		"kube-apiserver/service-account.key":          s.ServiceAccount.Key,
		"kube-apiserver/encryption.yaml":              encryption,
		"kube-controller-manager/ca.crt":              s.CA.Crt,
		"kube-controller-manager/ca.key":              s.CA.Key,
		"kube-controller-manager/service-account.key": s.ServiceAccount.Key,
	}
	for path, client := range map[string]config.CertKey{
		"kube-controller-manager/kubeconfig": s.ControllerManager,
		"kube-scheduler/kubeconfig":          s.Scheduler,
	} {
		if files[path], err = Kubeconfig("local", s.LocalEndpoint, s.CA.Crt, filepath.Dir(path), client); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// Kubeconfig is a client configuration with everything inside.
func Kubeconfig(cluster, server string, ca []byte, user string, client config.CertKey) ([]byte, error) {
	context := user + "@" + cluster
	return yaml.Marshal(map[string]any{
		"apiVersion": "v1",
		"kind":       "Config",
		"clusters": []any{map[string]any{"name": cluster, "cluster": map[string]any{
			"server": server, "certificate-authority-data": base64.StdEncoding.EncodeToString(ca),
		}}},
		"users": []any{map[string]any{"name": user, "user": map[string]any{
			"client-certificate-data": base64.StdEncoding.EncodeToString(client.Crt),
			"client-key-data":         base64.StdEncoding.EncodeToString(client.Key),
		}}},
		"contexts":        []any{map[string]any{"name": context, "context": map[string]any{"cluster": cluster, "user": user}}},
		"current-context": context,
	})
}

// encryptionConfig makes the apiserver encrypt Secrets. The last provider is for
// reading what was written before there was a key.
func encryptionConfig(key []byte) ([]byte, error) {
	providers := []any{map[string]any{"identity": map[string]any{}}}
	if len(key) > 0 {
		secretbox := map[string]any{"keys": []any{map[string]any{"name": "key1", "secret": base64.StdEncoding.EncodeToString(key)}}}
		providers = slices.Insert(providers, 0, any(map[string]any{"secretbox": secretbox}))
	}
	return yaml.Marshal(map[string]any{
		"apiVersion": "apiserver.config.k8s.io/v1",
		"kind":       "EncryptionConfiguration",
		"resources":  []any{map[string]any{"resources": []any{"secrets"}, "providers": providers}},
	})
}

// writeAll writes what differs. Each file is replaced in one step.
func writeAll(dir string, files map[string][]byte) error {
	for _, path := range slices.Sorted(maps.Keys(files)) {
		full := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(full), dirMode); err != nil {
			return fmt.Errorf("write secrets: %w", err)
		}
		if have, err := os.ReadFile(full); err == nil && string(have) == string(files[path]) {
			continue
		}
		if err := boot.WriteFile(full, files[path], fileMode); err != nil {
			return err
		}
	}
	return nil
}

// version is a hash of all files.
func version(files map[string][]byte) string {
	h := sha256.New()
	for _, path := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%s %d\n", path, len(files[path]))
		h.Write(files[path])
	}
	return hex.EncodeToString(h.Sum(nil)[:versionSize])
}
