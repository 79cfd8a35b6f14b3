{{- define "servekit.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "servekit.selector" -}}
app.kubernetes.io/name: servekit
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "servekit.labels" -}}
{{ include "servekit.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
{{- end }}

{{- define "servekit.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "servekit.keysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-keys" (include "servekit.name" .)) }}
{{- end }}

{{- define "servekit.workerKeySecret" -}}
{{ .Values.workers.keySecret | default (printf "%s-worker-key" (include "servekit.name" .)) }}
{{- end }}

{{- define "servekit.usesGroups" -}}
{{- if and .Values.workers.enabled (eq .Values.workers.kind "LeaderWorkerSet") }}true{{ end -}}
{{- end }}

{{- /* The model as a worker's pod finds it: a repository of Hugging Face has its revision behind its name. */ -}}
{{- define "servekit.workerModel" -}}
{{ .Values.model }}{{ with .Values.settings.revision }}{{ if not (contains "@" $.Values.model) }}@{{ . }}{{ end }}{{ end }}
{{- end }}

{{- /* Values that contradict each other. What a single value may be is in values.schema.json. */ -}}
{{- define "servekit.check" -}}
{{- $scales := ne .Values.autoscaling.kind "" -}}
{{- if and .Values.modelFile .Values.workers.enabled }}
{{- fail "modelFile and workers.enabled: a server with several models starts its workers itself; set workers.enabled: false" }}
{{- end }}
{{- if and .Values.workers.enabled (eq .Values.workers.kind "StatefulSet") (gt (int .Values.replicas) 1) }}
{{- fail (printf "replicas: %d and workers.kind: StatefulSet: all workers join one server; set replicas: 1, or workers.kind: LeaderWorkerSet for several servers with workers of their own" (int .Values.replicas)) }}
{{- end }}
{{- if and .Values.workers.enabled (gt (int .Values.gpu.count) 0) }}
{{- fail "gpu.count and workers.enabled: the server starts no workers itself then, so GPUs would idle in its pod; set workers.gpu.count in place of gpu.count" }}
{{- end }}
{{- if and .Values.cache.persistent (include "servekit.usesGroups" .) }}
{{- fail "cache.persistent and workers.kind: LeaderWorkerSet: groups have no claims of their own; set cache.persistent: false, or workers.kind: StatefulSet" }}
{{- end }}
{{- if and .Values.cache.persistent (ne .Values.cache.accessMode "ReadWriteMany") (not .Values.workers.enabled) }}
{{- if or $scales (gt (int .Values.replicas) 1) }}
{{- fail "cache.persistent with several servers: they may be on different nodes; set cache.accessMode: ReadWriteMany, or cache.persistent: false" }}
{{- end }}
{{- if gt (int .Values.maxSurge) 0 }}
{{- fail (printf "cache.persistent, cache.accessMode: %s and maxSurge: %d: at an update, a new pod on another node would wait for the volume of the old one, which would wait for the new one; set maxSurge: 0, which interrupts the service, or cache.accessMode: ReadWriteMany" .Values.cache.accessMode (int .Values.maxSurge)) }}
{{- end }}
{{- end }}
{{- if and .Values.apiKeys.enabled (not .Values.apiKeys.existingSecret) (not .Values.apiKeys.toml) }}
{{- fail "apiKeys.enabled: there are no keys; set apiKeys.existingSecret or apiKeys.toml, or apiKeys.enabled: false for a server that accepts every request" }}
{{- end }}
{{- if and .Values.inferencePool.enabled .Values.modelFile }}
{{- fail "inferencePool.enabled and modelFile: the pool's pods must all serve one model" }}
{{- end }}
{{- if and .Values.inferencePool.enabled .Values.apiKeys.enabled }}
{{- fail "inferencePool.enabled and apiKeys.enabled: the endpoint picker sends no key to /metrics, so it would see no queue; let the gateway check keys, and set apiKeys.enabled: false" }}
{{- end }}
{{- end }}

{{- define "servekit.podSettings" -}}
enableServiceLinks: false  # they would be variables that look like settings
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pods.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pods.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pods.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pods.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pods.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.pods.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "servekit.containerSettings" -}}
image: {{ include "servekit.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "servekit.environment" }}
{{- with .Values.huggingFaceToken.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- with .Values.pods.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Requests and limits of a container with GPUs. The argument is a list: resources, number of GPUs, their name. */ -}}
{{- define "servekit.resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- if gt (int (index . 1)) 0 -}}
{{- $_ := set $resources "limits" (merge (dict (index . 2) (int (index . 1))) ($resources.limits | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{- define "servekit.sharedMounts" -}}
- {name: cache, mountPath: /cache}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.sharedMemory }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- end }}

{{- define "servekit.sharedVolumes" }}
{{- with .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- with .Values.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- end }}

{{- define "servekit.serverPod" -}}
metadata:
  labels: {{- include "servekit.labels" . | nindent 4 }}
    app.kubernetes.io/component: server
    {{- with .Values.pods.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- $annotations := deepCopy .Values.pods.annotations }}
  {{- if and .Values.apiKeys.enabled .Values.apiKeys.toml }}
  {{- $_ := set $annotations "checksum/keys" (sha256sum .Values.apiKeys.toml) }}
  {{- end }}
  {{- if .Values.modelFile }}
  {{- $_ := set $annotations "checksum/models" (sha256sum .Values.modelFile) }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # preStop, then the drain, then what the server takes to end its workers.
  terminationGracePeriodSeconds: {{ add .Values.preStopSeconds .Values.shutdownTimeout 20 }}
  {{- include "servekit.podSettings" . | nindent 2 }}
  containers:
    - name: servekit
      {{- include "servekit.containerSettings" . | nindent 6 }}
      args:
        - serve
        {{- if .Values.modelFile }}
        - --models
        - /etc/servekit-models/models.toml
        {{- else }}
        - {{ .Values.model | quote }}
        {{- end }}
        {{- if .Values.apiKeys.enabled }}
        - --api-keys-file
        - /etc/servekit/keys.toml
        {{- end }}
        - --shutdown-timeout
        - {{ .Values.shutdownTimeout | quote }}
        - --load-timeout
        - {{ .Values.loadTimeout | quote }}
        {{- if .Values.workers.enabled }}
        - --listen-workers
        - tcp://0.0.0.0:{{ .Values.workers.port }}
        - --worker-key-file
        - /etc/servekit-workers/worker-key
        {{- if .Values.workers.tlsSecret }}
        - --worker-tls-cert
        - /etc/servekit-tls/tls.crt
        - --worker-tls-key
        - /etc/servekit-tls/tls.key
        {{- end }}
        {{- with .Values.workers.dtype }}
        - --dtype
        - {{ . }}
        {{- end }}
        {{- end }}
        {{- range $name, $value := .Values.settings }}
        {{- if kindIs "bool" $value }}
        - --{{ if not $value }}no-{{ end }}{{ $name }}
        {{- else }}
        - --{{ $name }}
        - {{ if kindIs "float64" $value }}{{ if eq $value (floor $value) }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | quote }}{{ end }}{{ else }}{{ $value | quote }}{{ end }}
        {{- end }}
        {{- end }}
      env:
        - {name: SERVEKIT_CACHE_DIR, value: /cache}  # the only folder that can be written
        {{- with include "servekit.environment" . | trim }}{{ . | nindent 8 }}{{ end }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if .Values.workers.enabled }}
        - {name: workers, containerPort: {{ .Values.workers.port }}}
        {{- end }}
      resources: {{- include "servekit.resources" (list .Values.resources .Values.gpu.count .Values.gpu.resourceName) | nindent 8 }}
      volumeMounts:
        {{- include "servekit.sharedMounts" . | nindent 8 }}
        {{- if .Values.apiKeys.enabled }}
        - {name: keys, mountPath: /etc/servekit, readOnly: true}
        {{- end }}
        {{- if .Values.modelFile }}
        - {name: model-file, mountPath: /etc/servekit-models, readOnly: true}
        {{- end }}
        {{- if .Values.workers.enabled }}
        - {name: worker-key, mountPath: /etc/servekit-workers, readOnly: true}
        {{- if .Values.workers.tlsSecret }}
        - {name: worker-tls, mountPath: /etc/servekit-tls, readOnly: true}
        {{- end }}
        {{- end }}
      lifecycle:
        preStop: {exec: {command: [sleep, {{ .Values.preStopSeconds | quote }}]}}
      # As long as --load-timeout. Until it succeeds, Kubernetes runs no other probe.
      startupProbe:
        httpGet: {path: {{ if .Values.workers.enabled }}/health{{ else }}/ready{{ end }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 6
        failureThreshold: {{ ceil (divf .Values.loadTimeout 5) }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 6  # /ready takes up to 5 s to sample a token
      # It tolerates failures: at --max-connections the server refuses probes, too.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
  volumes:
    - name: cache
      {{- if .Values.cache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim }}}
      {{- else if .Values.cache.persistent }}
      persistentVolumeClaim: {claimName: {{ include "servekit.name" . }}-cache}
      {{- else }}
      emptyDir: {sizeLimit: {{ .Values.cache.size }}}
      {{- end }}
    {{- with include "servekit.sharedVolumes" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- if .Values.apiKeys.enabled }}
    - name: keys
      secret: {secretName: {{ include "servekit.keysSecret" . }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.modelFile }}
    - name: model-file
      configMap: {name: {{ include "servekit.name" . }}-models}
    {{- end }}
    {{- if .Values.workers.enabled }}
    - name: worker-key
      secret: {secretName: {{ include "servekit.workerKeySecret" . }}, defaultMode: 0440}
    {{- with .Values.workers.tlsSecret }}
    - name: worker-tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- end }}
{{- end }}

{{- /* The argument is a list: the scope, the host name of the server, and whether the cache comes from a claim template. */ -}}
{{- define "servekit.workerPod" -}}
{{- $host := index . 1 -}}
{{- $hasClaimTemplate := index . 2 -}}
{{- with index . 0 -}}
metadata:
  labels: {{- include "servekit.labels" . | nindent 4 }}
    app.kubernetes.io/component: worker
    {{- with .Values.pods.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .Values.pods.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ .Values.workers.terminationGracePeriodSeconds }}
  {{- include "servekit.podSettings" . | nindent 2 }}
  containers:
    # It has no port and no probe: it connects to the server, and exits if it cannot work.
    - name: worker
      {{- include "servekit.containerSettings" . | nindent 6 }}
      command: [python, -m, servekit.worker]
      args:
        - --connect
        - tcp://{{ $host }}:{{ .Values.workers.port }}
        - --key-file
        - /etc/servekit-workers/worker-key
        {{- if .Values.workers.tlsSecret }}
        - --tls-ca
        - /etc/servekit-workers/ca.crt
        {{- end }}
        - --model  # not the server's path, which for a model from Hugging Face is in the cache of its pod
        - {{ include "servekit.workerModel" . | quote }}
        - --device
        - {{ if gt (int .Values.workers.gpu.count) 0 }}cuda:0{{ else }}cpu{{ end }}
        - --cache-dir
        - /cache
        - --log-format
        - json
      {{- with include "servekit.environment" . | trim }}
      env: {{- . | nindent 8 }}
      {{- end }}
      resources: {{- include "servekit.resources" (list .Values.workers.resources .Values.workers.gpu.count .Values.gpu.resourceName) | nindent 8 }}
      volumeMounts:
        {{- include "servekit.sharedMounts" . | nindent 8 }}
        - {name: worker-key, mountPath: /etc/servekit-workers, readOnly: true}
  volumes:
    {{- if not $hasClaimTemplate }}
    - name: cache
      emptyDir: {sizeLimit: {{ .Values.cache.size }}}
    {{- end }}
    {{- with include "servekit.sharedVolumes" . | trim }}{{ . | nindent 4 }}{{ end }}
    - name: worker-key
      projected:
        defaultMode: 0440
        sources:
          - secret: {name: {{ include "servekit.workerKeySecret" . }}, items: [{key: worker-key, path: worker-key}]}
          {{- with .Values.workers.tlsSecret }}
          - secret: {name: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}  # without the server's private key
          {{- end }}
{{- end }}
{{- end }}
