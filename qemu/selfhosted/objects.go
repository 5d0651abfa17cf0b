package selfhosted

import (
	"embed"
	"encoding/base64"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/oci"
	"gopkg.in/yaml.v3"
)

const (
	checkpointer = "pod-checkpointer"
	apiServer    = "kube-apiserver"
	manager      = "kube-controller-manager"
	scheduler    = "kube-scheduler"

	// mount is where the pods have the files of their Secrets.
	mount = "/etc/kubernetes/secrets"

	advertise = "--advertise-address="
)

// programs are the static pods that become DaemonSets of the same name.
var programs = []string{apiServer, manager, scheduler}

// ownDirs are the directories of a node whose files only static pods have: they are new after
// each boot.
var ownDirs = []string{"/system/secrets/", "/etc/kubernetes/"}

// daemonSet returns the DaemonSet of a static pod, and the directories of the node with the
// files for its Secret, which has the same name.
func daemonSet(name string, pod object) (set object, dirs []string) {
	spec := part(pod, "spec")
	delete(spec, "priority") // from priorityClassName
	container := spec["containers"].([]any)[0].(object)
	delete(spec, "securityContext") // such programs were root, as the owner of their Secrets' files is
	delete(container, "securityContext")
	at := map[string]string{} // where the container has the volumes that are in the Secret
	var volumes, mounts []any
	for _, v := range items(spec, "volumes") {
		host, _ := part(v, "hostPath")["path"].(string)
		if slices.ContainsFunc(ownDirs, func(dir string) bool { return strings.HasPrefix(host, dir) }) {
			dirs = append(dirs, host)
			at[v["name"].(string)] = ""
			continue
		}
		volumes = append(volumes, v)
	}
	for _, m := range items(container, "volumeMounts") {
		if _, gone := at[m["name"].(string)]; gone {
			at[m["name"].(string)] = m["mountPath"].(string)
			continue
		}
		mounts = append(mounts, m)
	}
	command, _ := container["command"].([]any)
	for i, arg := range command {
		text, _ := arg.(string)
		for _, path := range at {
			text = strings.ReplaceAll(text, path+"/", mount+"/")
		}
		if strings.HasPrefix(text, advertise) {
			text = advertise + "$(POD_IP)"
		}
		command[i] = text
	}
	container["env"] = []any{object{"name": "POD_IP", "valueFrom": object{"fieldRef": object{"fieldPath": "status.podIP"}}}}
	container["volumeMounts"] = append(mounts, object{"name": "secrets", "mountPath": mount, "readOnly": true})
	spec["volumes"] = append(volumes, object{"name": "secrets", "secret": object{"secretName": name}})
	return asDaemonSet(name, spec), dirs
}

func part(o object, field string) object {
	p, _ := o[field].(object)
	return p
}

func items(o object, field string) (all []object) {
	list, _ := o[field].([]any)
	for _, item := range list {
		if i, ok := item.(object); ok {
			all = append(all, i)
		}
	}
	return all
}

// asDaemonSet returns a DaemonSet that runs a pod on all control planes.
func asDaemonSet(name string, spec object) object {
	set := manifests("daemonset", "$NAME", name)[0]
	template := part(part(set, "spec"), "template")
	maps.Copy(spec, part(template, "spec"))
	template["spec"] = spec
	return set
}

//go:embed manifests
var files embed.FS

// manifests returns the objects of a file, with words replaced.
func manifests(file string, words ...string) (all []object) {
	text, err := files.ReadFile("manifests/" + file + ".yaml")
	for list := yaml.NewDecoder(strings.NewReader(strings.NewReplacer(words...).Replace(string(text)))); err == nil; {
		var o object
		if err = list.Decode(&o); err == nil {
			all = append(all, o)
		}
	}
	if !errors.Is(err, io.EOF) {
		panic(file + ": " + err.Error()) // a test reads all
	}
	return all
}

func checkpointerDaemonSet() object {
	return asDaemonSet(checkpointer, manifests("checkpointer-pods", "$IMAGE", oci.PodCheckpointerImage)[0])
}

func secret(name string, files map[string][]byte) object {
	data := object{}
	for key, value := range files {
		data[key] = base64.StdEncoding.EncodeToString(value)
	}
	return object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": name, "namespace": namespace}, "data": data}
}

// markPod returns a pod that writes the mark of a self-hosted control plane to the etcd of a
// control plane.
func markPod(node string) object {
	return manifests("mark", "$NODE", node, "$ETCD", config.DefaultEtcdImage)[0]
}
